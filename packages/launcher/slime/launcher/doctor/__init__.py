"""`slime doctor`: looks at a machine before a run costs money. It changes nothing."""
