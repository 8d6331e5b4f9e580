"""Screening: how much each contribution to a fragment counts, by what the coordinator itself measures in it. Pure.

measuring.py  one contribution, while it is checked: its norm, and a sketch by which its direction can be compared
judging.py    all contributions that closed a fragment: which are left out, which are shortened, and why
"""
