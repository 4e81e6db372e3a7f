"""The papers' claims, run again at the size of one machine."""
