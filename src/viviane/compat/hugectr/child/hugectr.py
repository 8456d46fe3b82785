"""What `import hugectr` finds in a program that a script under `viviane hugectr` has started."""

from viviane.compat.hugectr.module_install import install

if __name__ == "hugectr":  # and not where a tool imports all modules of the package
    install()  # puts HugeCTR's module in place of this one
