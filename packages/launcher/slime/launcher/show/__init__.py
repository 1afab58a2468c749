"""`slime show`, `slime runs` and `slime compare`: look at the directories of runs, while they go on and afterwards."""
