"""How accurate the simulator is: predicted steps against steps in the lab."""
