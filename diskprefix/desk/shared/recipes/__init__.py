"""The settings of clients, and the agents that are known."""
