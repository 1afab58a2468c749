"""`slime doctor`: checks a machine before a run costs money. It changes nothing."""
