"""Assembles the services on Ray and drives training."""
