"""A folder on the path of programs that a script starts: their `import hugectr` finds the installed module, too."""
