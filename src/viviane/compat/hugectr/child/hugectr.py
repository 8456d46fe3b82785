"""What `import hugectr` finds in a program that a script under `viviane hugectr` has started."""

from viviane.compat.hugectr.door import stay_open

if __name__ == "hugectr":  # and not where a tool imports all modules of the package
    stay_open()  # puts HugeCTR's module in the place of this one
