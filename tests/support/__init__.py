"""What the tests share: private daemons, the census of kernel objects, deadlines, raw HTTP."""
