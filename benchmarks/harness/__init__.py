"""Compares retrograde with plain autograd and its peers: contenders, sizes, measurements and reports."""
