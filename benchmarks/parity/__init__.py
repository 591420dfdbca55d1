"""`polyrhythm bench parity`: the same result whatever the cut, the sync mode and the restart."""
