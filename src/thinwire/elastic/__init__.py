"""Groups of workers that come and go while a run goes on."""
