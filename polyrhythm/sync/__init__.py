"""Who averages when: policies that form groups, and the scheduler that drives them."""
