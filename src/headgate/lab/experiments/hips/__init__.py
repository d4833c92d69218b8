"""Shared by the experiments on the HiPS'21 paper (`hybrid_characterisation`, `hybrid_*ms`)."""
