"""Muon: an optimizer that orthogonalizes the momentum of matrices, whose parts several actors may hold."""
