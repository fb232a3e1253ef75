"""The clusters of HAP and HeteroG, and reconstructions of their policies, simulated."""
