"""Reading facts off the machine, the volume and the GPU; each Fact says how it is known."""
