"""Function on AWS Lambda: the service's application, called with the events of a Function URL or of an API Gateway.

BUNDLE in the environment names the file of the bundle, ML_FACTORY_API_KEY the key. Feeds end with the instance.
"""

import os
from pathlib import Path

from mangum import Mangum

from ml_factory.serving.app import KEY_VARIABLE, build_app, check_service_address, parse_api_key
from ml_factory.serving.feed import ServedBundle

key = parse_api_key(os.environ.get(KEY_VARIABLE, ""))
check_service_address("0.0.0.0", key, no_key=False)
handler = Mangum(build_app([ServedBundle.load(os.environ["BUNDLE"])], Path("/tmp/feeds"), key), lifespan="off")
