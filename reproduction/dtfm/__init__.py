"""DT-FM: placement on five networks, from one data centre to the whole world."""
