// Copyright the Colibri authors. Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
//
// colibri.v1.Experts from C++: Forward, which routes, and one mini-batch over an Execute stream, which computes what the caller has chosen.
//
//   colibri serve tiny --experts-api
//   make -C ops/examples && ops/examples/build/experts localhost:50051
//
// Arrays travel little-endian, which this program takes the machine to be.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "colibri/v1/experts.grpc.pb.h"

namespace pb = colibri::v1;

namespace {

constexpr int kRows = 4;
constexpr uint32_t kLayer = 0;
constexpr std::chrono::seconds kPatience{30};

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> values_of(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

void check(const grpc::Status& status, const char* what) {
  if (!status.ok()) throw std::runtime_error(std::string(what) + ": " + status.error_message());
}

// What the layer's block gives for rows [kRows, hidden], the experts [kRows, k] it chose, and their weights.
pb::ForwardResponse forward(pb::Experts::Stub& stub, const std::vector<float>& rows, uint32_t hidden) {
  pb::ForwardRequest request;
  request.set_layer(kLayer);
  pb::Tensor* tensor = request.mutable_hidden();
  tensor->set_dtype(pb::DATA_TYPE_F32);
  tensor->add_shape(kRows);
  tensor->add_shape(hidden);
  tensor->set_data(bytes_of(rows));
  pb::ForwardResponse answer;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  check(stub.Forward(&context, request, &answer), "Forward");
  return answer;
}

// A mini-batch of the experts that a router, here that of `routed`, has chosen: pairs go expert by expert, rows ascending.
pb::ExecuteRequest batch_of(const pb::ForwardResponse& routed, const std::vector<float>& rows) {
  const std::vector<int32_t> experts = values_of<int32_t>(routed.experts().data());
  const std::vector<float> weights = values_of<float>(routed.weights().data());
  const size_t k = experts.size() / kRows;
  std::map<int32_t, std::vector<std::pair<int32_t, float>>> pairs;
  for (size_t i = 0; i < experts.size(); i++) pairs[experts[i]].emplace_back(static_cast<int32_t>(i / k), weights[i]);
  std::vector<int32_t> row_of_pair;
  std::vector<float> weight_of_pair;
  pb::ExecuteRequest request;
  pb::ExpertBatch* batch = request.mutable_batch();
  for (const auto& [expert, own] : pairs) {
    batch->add_experts(static_cast<uint32_t>(expert));
    batch->add_counts(static_cast<uint32_t>(own.size()));
    for (const auto& [row, weight] : own) {
      row_of_pair.push_back(row);
      weight_of_pair.push_back(weight);
    }
  }
  batch->set_id(1);
  batch->set_layer(kLayer);
  batch->set_dtype(pb::DATA_TYPE_F32);
  batch->set_rows(kRows);
  batch->set_data(bytes_of(rows));
  batch->set_row_of_pair(bytes_of(row_of_pair));
  batch->set_weights(bytes_of(weight_of_pair));
  return request;
}

// An Execute stream. A program would keep it open and use it for every layer of every step.
class Stream {
 public:
  explicit Stream(pb::Experts::Stub& stub) {
    context_.set_deadline(std::chrono::system_clock::now() + kPatience);
    stream_ = stub.Execute(&context_);
    pb::ExecuteRequest opening;
    opening.mutable_open()->set_front_end("experts.cc");
    opened_ = ask(opening).opened();
  }

  pb::ExecuteResponse ask(const pb::ExecuteRequest& request) {
    pb::ExecuteResponse answer;
    if (!stream_->Write(request) || !stream_->Read(&answer)) check(stream_->Finish(), "Execute");
    if (answer.has_failed()) throw std::runtime_error("Execute: " + answer.failed().message());
    return answer;
  }

  void close() {
    stream_->WritesDone();
    check(stream_->Finish(), "Execute");
  }

  const pb::NodeDescription& opened() const { return opened_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<pb::ExecuteRequest, pb::ExecuteResponse>> stream_;
  pb::NodeDescription opened_;
};

void run(const std::string& target) {
  auto stub = pb::Experts::NewStub(grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  Stream stream(*stub);
  const pb::NodeDescription& model = stream.opened();
  std::cout << model.model() << ": " << model.layers() << " layers of " << model.experts() << " experts, hidden " << model.hidden() << "\n";
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> rows(size_t{kRows} * model.hidden());
  for (float& x : rows) x = normal(random);
  const pb::ForwardResponse routed = forward(*stub, rows, model.hidden());
  const pb::ExecuteResponse executed = stream.ask(batch_of(routed, rows));
  stream.close();
  double square = 0;
  for (float x : values_of<float>(routed.hidden().data())) square += double{x} * x;
  std::cout << "Forward: |out| = " << std::sqrt(square) << "\n";
  std::cout << "Execute: " << (executed.result().data() == routed.hidden().data() ? "the same bits" : "OTHER BITS") << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : "localhost:50051");
  } catch (const std::exception& error) {
    std::cerr << "experts: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
