/* Walks a table of moves on an Ethernet core of a Wormhole chip. See meshmend/wormhole/table.py for
 * what a move says, and where the header and the table are. The firmware calls `main`, and goes on
 * when it returns.
 *
 * Each move is over when the next begins: a write over the NOC was acknowledged, and the queue of
 * the cable has taken what it was given. So a counter is never set before its data is there. */
#include "add.h"

#define REGISTER(address) (*(volatile uint32_t *)(address))
#define HEADER_AT 0x1E000u
#define STAGING_AT (HEADER_AT + 0x40u)
#define DONE_MARK 0x600D600Du

/* The queue of the cable. */
#define CABLE_COMMAND REGISTER(0xFFB90004u)
#define CABLE_SOURCE REGISTER(0xFFB90014u)
#define CABLE_BYTES REGISTER(0xFFB90018u)
#define CABLE_TARGET REGISTER(0xFFB9001Cu)
#define CABLE_SEND 2u

/* The chip's network. An address is 36 bits, and above them the place of a core. */
#define NOC 0xFFB20000u
#define NOC_SOURCE REGISTER(NOC + 0x00u) /* an inline write has its target here */
#define NOC_SOURCE_PLACE REGISTER(NOC + 0x04u)
#define NOC_TARGET REGISTER(NOC + 0x0Cu)
#define NOC_TARGET_PLACE REGISTER(NOC + 0x10u)
#define NOC_CONTROL REGISTER(NOC + 0x1Cu)
#define NOC_BYTES REGISTER(NOC + 0x20u)
#define NOC_DATA REGISTER(NOC + 0x24u)
#define NOC_COMMAND REGISTER(NOC + 0x28u)
#define NOC_OWN_PLACE REGISTER(NOC + 0x2Cu)
#define NOC_WRITES_ACKNOWLEDGED REGISTER(NOC + 0x204u)
#define NOC_READS_DONE REGISTER(NOC + 0x208u)
#define NOC_READ 0x10u /* with a response, as all here */
#define NOC_WRITE 0x12u
#define NOC_WRITE_INLINE 0x1Au
#define NOC_MOST_BYTES 8192u

#define CLOCK REGISTER(0xFFB121F0u)

enum { WAIT = 1, ADD, COPY, SEND, PASS, LOAD, STORE };

typedef struct {
  uint32_t op, target, source, bytes, counter, place;
  int32_t value, per_slice;
} Move;

typedef struct {
  uint32_t n_moves, table, n_slices, type;
  uint32_t sent_bytes, done_moves, first_clock, last_clock, done;
} Header;

static void send(uint32_t target, uint32_t source, uint32_t bytes) {
  CABLE_SOURCE = source, CABLE_BYTES = bytes, CABLE_TARGET = target;
  CABLE_COMMAND = CABLE_SEND;
  while (CABLE_COMMAND) {
  }
}

static void noc_start(uint32_t control) {
  NOC_CONTROL = control;
  NOC_COMMAND = 1;
  while (NOC_COMMAND) {
  }
}

static void noc_write(uint32_t place, uint32_t target, uint32_t source, uint32_t bytes, uint32_t own) {
  while (bytes) {
    uint32_t part = bytes < NOC_MOST_BYTES ? bytes : NOC_MOST_BYTES;
    uint32_t before = NOC_WRITES_ACKNOWLEDGED;
    NOC_SOURCE = source, NOC_SOURCE_PLACE = own << 4;
    NOC_TARGET = target, NOC_TARGET_PLACE = place << 4;
    NOC_BYTES = part;
    noc_start(NOC_WRITE);
    while (NOC_WRITES_ACKNOWLEDGED == before) {
    }
    target += part, source += part, bytes -= part;
  }
}

static void noc_read(uint32_t place, uint32_t target, uint32_t source, uint32_t bytes, uint32_t own) {
  while (bytes) {
    uint32_t part = bytes < NOC_MOST_BYTES ? bytes : NOC_MOST_BYTES;
    uint32_t before = NOC_READS_DONE;
    NOC_SOURCE = source, NOC_SOURCE_PLACE = place << 4;
    NOC_TARGET = target, NOC_TARGET_PLACE = own << 4;
    NOC_BYTES = part;
    noc_start(NOC_READ);
    while (NOC_READS_DONE == before) {
    }
    target += part, source += part, bytes -= part;
  }
}

static void noc_set(uint32_t place, uint32_t target, uint32_t value, uint32_t own) {
  uint32_t before = NOC_WRITES_ACKNOWLEDGED;
  NOC_SOURCE = target, NOC_SOURCE_PLACE = place << 4;
  NOC_TARGET = 0, NOC_TARGET_PLACE = own << 4;
  NOC_BYTES = 0xFu << (target & 15);
  NOC_DATA = value;
  noc_start(NOC_WRITE_INLINE);
  while (NOC_WRITES_ACKNOWLEDGED == before) {
  }
}

static void copy_words(uint32_t *target, const uint32_t *source, uint32_t n) {
  for (const uint32_t *end = source + n; source != end; source += 4, target += 4) {
    uint32_t a = source[0], b = source[1], c = source[2], d = source[3];
    target[0] = a, target[1] = b, target[2] = c, target[3] = d;
  }
}

__attribute__((section(".text.main"))) void main(void) {
  volatile Header *header = (volatile Header *)HEADER_AT;
  const Move *first = (const Move *)header->table, *end = first + header->n_moves;
  uint32_t type = header->type, own = NOC_OWN_PLACE & 0xFFFu, sent = 0;
  header->first_clock = CLOCK;
  for (uint32_t slice = 0; slice < header->n_slices; slice++) {
    for (const Move *move = first; move != end; move++) {
      int32_t value = move->value + (int32_t)slice * move->per_slice;
      uint32_t bytes = move->bytes, offset = slice * (uint32_t)move->per_slice;
      switch (move->op) {
        case WAIT:
          while (*(volatile int32_t *)move->counter < value) {
          }
          break;
        case ADD:
          add_words((uint32_t *)move->target, (const uint32_t *)move->source, bytes / 4, type);
          break;
        case COPY:
          copy_words((uint32_t *)move->target, (const uint32_t *)move->source, bytes / 4);
          break;
        case SEND:
          if (bytes) send(move->target, move->source, bytes);
          REGISTER(STAGING_AT) = (uint32_t)value;
          (void)REGISTER(STAGING_AT); /* so that it is in memory before the queue reads it */
          send(move->counter, STAGING_AT, 16);
          sent += bytes + 16;
          break;
        case PASS:
          noc_write(move->place, move->target, move->source, bytes, own);
          noc_set(move->place, move->counter, (uint32_t)value, own);
          break;
        case LOAD:
          noc_read(move->place, move->target, move->source + offset, bytes, own);
          break;
        case STORE:
          noc_write(move->place, move->target + offset, move->source, bytes, own);
          break;
      }
      header->done_moves++;
    }
  }
  header->sent_bytes = sent;
  header->last_clock = CLOCK;
  header->done = DONE_MARK;
}
