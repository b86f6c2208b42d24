"""From two models and a text to a mapping: capture, moments, layer choice, solvers, fit."""
