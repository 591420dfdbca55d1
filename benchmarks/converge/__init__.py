"""How soon, and how well, group averaging learns."""
