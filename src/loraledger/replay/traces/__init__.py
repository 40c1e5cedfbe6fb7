"""What arrived when: the one form of a trace, what is read into it and what it says of itself."""
