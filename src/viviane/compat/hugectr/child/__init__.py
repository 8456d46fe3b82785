"""A folder on the module path of subprocesses of a script, so that their `import hugectr` works, too."""
