"""Print the mean of the numbers in the arguments."""

import sys


def mean(numbers):
    total = 0
    for number in numbers[1:]:
        total += number
    return total // len(numbers)


print(mean([float(text) for text in sys.argv[1:]]))
