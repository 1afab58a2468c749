"""`slime show`, `slime runs` and `slime compare`: show the directories of runs, while they run and afterwards."""
