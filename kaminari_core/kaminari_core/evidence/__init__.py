"""What a reply says about itself: how sure it is, where it points in the picture, and whether it went round in circles.

Nothing here computes a reply. `loops` watches one as it grows; everything else reads results that are complete.
"""
