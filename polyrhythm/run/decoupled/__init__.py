"""All-reduce in two halves: gradients scatter during backward, weights gather during forward."""
