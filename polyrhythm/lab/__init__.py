"""Rehearse on one machine: a network of hosts with chosen latency, bandwidth and faults."""
