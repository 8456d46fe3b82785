"""Viviane: train and serve large deep-learning recommenders in Python."""
