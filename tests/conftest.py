import signal

from tests import ranks

ranks.preload()
# A shell that starts us in the background lets us ignore Ctrl-C, and all that we start; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
