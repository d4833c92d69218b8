"""The commands, one file each. A command's name is its file's name; there is no list to edit."""
