"""Offline calibrations of a checkpoint, whose results servers take by a flag."""
