/* Requests of rows, for calls in one line. */
#ifndef REQUESTS_H
#define REQUESTS_H
#include "nvme_gpu.h"

#define REQUEST(ids_, id_type_, count_, stride_, status_, stream_, ...)                           \
    (&(nvme_gpu_row_request){ .size = sizeof(nvme_gpu_row_request), .ids = (ids_),                \
                              .id_type = (id_type_), .count = (count_), .stride = (stride_),      \
                              .row_status = (status_), .stream = (stream_), __VA_ARGS__ })
#define GATHER(ids_, id_type_, count_, out_, stride_, status_, stream_)                           \
    REQUEST(ids_, id_type_, count_, stride_, status_, stream_, .out = (out_))
#define GATHER_AS(stored_, dtype_, ids_, id_type_, count_, out_, stride_, status_, stream_)       \
    REQUEST(ids_, id_type_, count_, stride_, status_, stream_, .out = (out_),                     \
            .stored = (stored_), .dtype = (dtype_))
#define SCATTER(ids_, id_type_, count_, rows_, stride_, duplicates_, status_, stream_)            \
    REQUEST(ids_, id_type_, count_, stride_, status_, stream_, .rows = (rows_),                   \
            .duplicates = (duplicates_))
#define ADD(ids_, id_type_, count_, rows_, stride_, element_, status_, stream_)                   \
    REQUEST(ids_, id_type_, count_, stride_, status_, stream_, .rows = (rows_),                   \
            .element = (element_))
#endif
