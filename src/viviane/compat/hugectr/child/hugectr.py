"""What `import hugectr` finds in a program that a script under `viviane hugectr` has started."""

from viviane.compat.hugectr.door import stay_open

stay_open()  # puts HugeCTR's module in the place of this one
