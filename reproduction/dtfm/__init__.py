"""DT-FM: five networks from a data centre to the whole world, against Megatron and at random."""
