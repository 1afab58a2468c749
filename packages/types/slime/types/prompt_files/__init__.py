"""Files of prompts: readers by the ending of the name, rows of a part of a file, data sets of reasoning-gym."""
