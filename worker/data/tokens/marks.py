"""Marks of the tokens of conversations: two bits above the 30 of an id, in shards and in batches.

    BEGINS    the first token of a conversation; attention and positions start anew here
    TRAINED   the token counts in the loss as a target, predicted from the tokens before it

A conversation's first token is never trained on: nothing precedes it. Tokens that pad a sequence have no marks.
"""

BEGINS = 1 << 30
TRAINED = 1 << 31
IDS = BEGINS - 1  # the bits of an id
