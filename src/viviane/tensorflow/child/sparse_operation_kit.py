"""What `import sparse_operation_kit` finds in a program that a script under `viviane sok` has started."""

import sys

if __name__ == "sparse_operation_kit":  # and not where a tool imports all modules of the package
    from viviane.tensorflow.run import own_modules

    sys.modules.update(own_modules())
