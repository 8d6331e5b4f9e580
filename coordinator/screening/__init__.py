"""Screening: what each contribution to a fragment may count, by what the coordinator itself finds in it. Pure.

measuring.py  of one contribution, while it is checked: its norm, and a sketch from which its direction can be compared
judging.py    of all that closed a fragment: who is left out, who is clipped, and why
"""
