#include "disk_bindings.h"

#include <pybind11/stl.h>

#include <cerrno>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "buffers.h"
#include "disk_reader.h"
#include "disk_writer.h"

namespace py = pybind11;

namespace poplar {
namespace {

void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const EndOfFile& error) {
    PyErr_SetString(PyExc_EOFError, error.what());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
}

}  // namespace

void define_disk_files(py::module_& module) {
  py::register_local_exception_translator(translate);
  module.attr("DISK_BUFFER_BYTES") = kBufferBytes;

  py::class_<DiskWriter>(
      module, "DiskWriter",
      R"(Writes a file in order, past the page cache where the file system can do that.

The caller fills one buffer, with checksums, while a thread writes another one. For one thread.

Raises:
    OSError: from all methods. The one of a write may be raised by a later call.)")
      .def(py::init<int>(), py::arg("descriptor"),
           "Args:\n    descriptor: of a new file. It is closed with this object.")
      .def(
          "append",
          [](DiskWriter& self, const py::buffer& data, std::uint32_t crc) {
            const py::buffer_info info = contiguous(data);
            const py::gil_scoped_release others_may_run;
            return self.append(info.ptr, bytes_of(info), crc);
          },
          py::arg("data"), py::arg("crc") = 0,
          R"(Append bytes, which may change afterwards, and return their CRC-32C.

Args:
    data: any object with a contiguous buffer.
    crc: the checksum of the bytes before.

Releases the GIL.)")
      .def("close", &DiskWriter::close, py::call_guard<py::gil_scoped_release>(),
           "Close the file once its content is on the disk. Releases the GIL.")
      .def("abandon", &DiskWriter::abandon, py::call_guard<py::gil_scoped_release>(),
           "Close the file without waiting for the disk, except for a write that has begun.")
      .def_property_readonly("is_direct", &DiskWriter::is_direct,
                             "Whether writes pass the page cache, as far as is known yet.");

  py::class_<DiskReader>(
      module, "DiskReader",
      R"(Reads ranges of a file, past the page cache where the file system can do that.

For one thread.)")
      .def(py::init<int>(), py::arg("descriptor"),
           "Args:\n    descriptor: of the file. It is closed with this object.")
      .def("expect", &DiskReader::expect, py::arg("until"),
           "Bytes before this one will be read next, so that they may be read together.")
      .def(
          "read",
          [](DiskReader& self, std::size_t offset, std::size_t length,
             const std::optional<py::buffer>& target, std::uint32_t crc) {
            void* address = nullptr;
            std::optional<py::buffer_info> info;
            if (target) {
              info = contiguous(*target, true);
              if (bytes_of(*info) != length) {
                throw std::invalid_argument("the target must have as many bytes as are read");
              }
              address = info->ptr;
            }
            const py::gil_scoped_release others_may_run;
            return self.read(offset, length, address, crc);
          },
          py::arg("offset"), py::arg("length"), py::arg("target") = py::none(), py::arg("crc") = 0,
          R"(Read bytes and return their CRC-32C.

Args:
    offset: the first byte in the file.
    length: the number of bytes.
    target: a writable contiguous buffer of as many bytes; None: only the checksum is wanted.
    crc: the checksum of the bytes before.

Raises:
    EOFError: the file ends before; the message names the first missing byte.
    OSError: reading failed.

Releases the GIL.)")
      .def_property_readonly("is_direct", &DiskReader::is_direct,
                             "Whether reads pass the page cache, as far as is known yet.");
}

}  // namespace poplar
