"""The module that `import hugectr` finds in subprocesses of a script under `viviane hugectr`."""

from viviane.compat.hugectr.module_install import install

if __name__ == "hugectr":  # not if a tool imports all modules of the package
    install()  # replaces this module by HugeCTR's
