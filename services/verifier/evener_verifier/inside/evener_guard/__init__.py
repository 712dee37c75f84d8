"""Inside an in-process grader: a test runner proves to the verifier that it was not turned against the tests.

Loaded before any of the candidate's code: by pytest as a plugin, by unittest through ``sitecustomize``. Around the tests it
runs two checks by the runner's own path, one that must pass and one that must fail. `Line` tells the verifier how they and the
tests went, ends what the candidate's code left running, and ends the process itself, so that no handler of the candidate's
comes after. A runner that ends without that word was ended by somebody else. The package stands alone; Python 3.8 and later.
"""
