// Functions that others call.
#pragma once

#define EXPORT __attribute__((visibility("default")))
