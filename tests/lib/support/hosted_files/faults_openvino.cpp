/* An extension of OpenVINO with an operator: Faulty(x) is x + 1, unless the first value of x is a fault's number. */

#include <memory>
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>
#include <stdexcept>
#include <vector>

#include "faults.h"

class Faulty : public ov::op::Op {
 public:
  OPENVINO_OP("Faulty", "faulty");
  Faulty() = default;
  explicit Faulty(const ov::Output<ov::Node>& x) : Op({x}) { constructor_validate_and_infer_types(); }

  void validate_and_infer_types() override {
    set_output_type(0, get_input_element_type(0), get_input_partial_shape(0));
  }
  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    return std::make_shared<Faulty>(inputs.at(0));
  }
  bool visit_attributes(ov::AttributeVisitor&) override { return true; }
  bool has_evaluate() const override { return true; }
  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    const float* x = inputs[0].data<const float>();
    if (const char* text = fail(static_cast<int>(x[0]))) throw std::runtime_error(text);
    for (size_t i = 0; i < inputs[0].get_size(); ++i) outputs[0].data<float>()[i] = x[i] + 1;
    return true;
  }
};

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<Faulty>>()}));
