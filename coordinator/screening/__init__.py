"""Screening: how much each contribution to a fragment counts, by what the coordinator itself measures in it. Pure.

measuring.py  measures one contribution while it is checked: its norm, and a sketch to compare its direction with others
judging.py    judges all contributions to a closed fragment: which are left out, which are shortened, and why
"""
