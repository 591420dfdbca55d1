"""How true the simulator is: steps that it predicts, and the same steps in the lab."""
