"""Does the turn ratio, or the normalization, keep off-policy training from collapsing?"""
