"""RLT's reward inside other people's trainers; `trl` and `verl` import neither of these packages."""
