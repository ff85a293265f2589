"""Recorded steps of a run, trained again and compared with the record."""
