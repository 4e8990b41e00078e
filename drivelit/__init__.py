__version__ = "0.2.0"

from .scene.extras import name_the_extra as _name_the_extra

_name_the_extra()
