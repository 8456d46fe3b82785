"""The training step: objective, precision, guard, gradients of all ranks, and the program that runs them in order."""
