/* Sums of int32, float32 and bfloat16 in integer arithmetic: Ethernet cores have no FPU.
 *
 * float32_add rounds to nearest, ties to even, with subnormal numbers, as IEEE 754 says. The result
 * of two infinities of unequal sign, or with a NaN, is a quiet NaN. bfloat16_add rounds the exact
 * sum once more than needed, which changes nothing: float32 has more than twice its digits. */
#include <stdint.h>

static inline uint32_t float32_add(uint32_t a, uint32_t b) {
  uint32_t abs_a = a & 0x7FFFFFFFu, abs_b = b & 0x7FFFFFFFu;
  if (abs_a < abs_b) { /* from here on a is the larger one */
    uint32_t swap = a;
    a = b, b = swap;
    swap = abs_a, abs_a = abs_b, abs_b = swap;
  }
  if (abs_a >= 0x7F800000u) {
    if (abs_a > 0x7F800000u) return a | 0x00400000u;
    return abs_b == 0x7F800000u && a != b ? 0x7FC00000u : a;
  }
  if (!abs_b) return abs_a ? a : a & b;
  /* Three more digits: two to round by, and one that says whether anything was beyond them. */
  uint32_t exponent = abs_a >> 23, shift = exponent - (abs_b >> 23);
  uint32_t sum = (abs_a << 8 | 0x80000000u) >> 5, other = (abs_b << 8 | 0x80000000u) >> 5;
  if (abs_b < 0x800000u) { /* a subnormal number has no leading digit, and the exponent one */
    other = abs_b << 3;
    if (exponent) shift--;
    else sum = abs_a << 3, exponent = 1;
  }
  if (shift) other = shift > 26 ? 1 : other >> shift | (other << (32 - shift) ? 1 : 0);
  if ((int32_t)(a ^ b) < 0) {
    sum -= other;
    if (!sum) return 0;
    while (sum < 1u << 18 && exponent > 8) sum <<= 8, exponent -= 8;
    while (sum < 1u << 26 && exponent > 1) sum <<= 1, exponent--;
  } else {
    sum += other;
    if (sum >> 27) sum = sum >> 1 | (sum & 1), exponent++;
  }
  sum = (sum + 3 + (sum >> 3 & 1)) >> 3;
  /* The leading digit counts as one in the exponent. */
  uint32_t result = ((exponent - 1) << 23) + sum;
  if (result > 0x7F800000u) result = 0x7F800000u;
  return (a & 0x80000000u) | result;
}

static inline uint32_t bfloat16_add(uint32_t a, uint32_t b) {
  uint32_t sum = float32_add(a << 16, b << 16);
  if ((sum & 0x7FFFFFFFu) > 0x7F800000u) return sum >> 16 | 0x40u;
  return (sum + 0x7FFFu + (sum >> 16 & 1)) >> 16;
}

enum { INT32, FLOAT32, BFLOAT16 };

/* Add n words at source to those at target; n is a multiple of four. Not inlined, so that its loops
 * have all registers. */
__attribute__((noinline)) static void add_words(uint32_t *target, const uint32_t *source, uint32_t n, uint32_t type) {
  const uint32_t *end = source + n;
  if (type == INT32) {
    for (; source != end; source += 4, target += 4) {
      uint32_t a = source[0], b = source[1], c = source[2], d = source[3];
      target[0] += a, target[1] += b, target[2] += c, target[3] += d;
    }
  } else if (type == FLOAT32) {
    for (; source != end; source++, target++) *target = float32_add(*target, *source);
  } else {
    for (; source != end; source++, target++) {
      uint32_t a = *target, b = *source;
      *target = bfloat16_add(a & 0xFFFFu, b & 0xFFFFu) | bfloat16_add(a >> 16, b >> 16) << 16;
    }
  }
}
